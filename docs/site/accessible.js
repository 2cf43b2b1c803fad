/* Names what the theme leaves without a name, and lets the keyboard reach what scrolls sideways. */
(() => {
  let blocks = 0
  const complete = () => {
    document.querySelector(".md-search")?.setAttribute("aria-label", "Search")
    for (const bar of document.querySelectorAll(".md-code__nav:not([aria-label])"))
      bar.setAttribute("aria-label", `Code block ${++blocks}`)
    for (const region of document.querySelectorAll("pre > code, .md-typeset__scrollwrap, .md-typeset__table"))
      if (region.scrollWidth > region.clientWidth) region.setAttribute("tabindex", "0")
  }
  new MutationObserver(complete).observe(document.body, { childList: true, subtree: true })
  window.addEventListener("resize", complete)
  window.addEventListener("load", complete)
})()
