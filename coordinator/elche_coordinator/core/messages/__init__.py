"""What goes in and out of the core: ids, specs, events, commands, reports. Frozen values, no behaviour."""
