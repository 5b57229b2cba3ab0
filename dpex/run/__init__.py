"""Run unmodified scripts with dpex behind their loaders, and report on the loaders at the end."""
