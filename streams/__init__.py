"""Between topics: pure processors (`experience`) and the hosts that run them (`hosts.bus`, `hosts.faust`)."""
