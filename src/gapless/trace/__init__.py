"""Where the device's time went: reading profiles of any engine, and who caused each gap."""
