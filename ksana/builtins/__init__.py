"""The plugins that ship with the core: thin modules of hook implementations."""
