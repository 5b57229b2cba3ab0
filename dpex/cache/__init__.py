"""A cache of prepared samples, in memory that all processes of a machine share and on disk: `dpex.cached`."""
