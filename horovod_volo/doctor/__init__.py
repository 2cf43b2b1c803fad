"""One command that says what is wrong with an installation, a host, or the ways between hosts."""
