"""The plugin system: finding plugins, registering them in a fixed order, and failing clearly when one is broken."""
