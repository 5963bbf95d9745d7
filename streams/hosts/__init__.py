"""What runs a processor: `hosts.bus` on any Headrace bus, exactly once; `hosts.faust` as a Faust app, at
least once."""
