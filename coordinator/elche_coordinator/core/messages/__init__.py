"""Messages into and out of the core: ids, specs, events, commands, reports. Frozen values without behaviour."""
