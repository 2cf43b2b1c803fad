"""A step on many ranks, computed: messages, links, negotiation and stragglers. Nothing here meets a rank."""
