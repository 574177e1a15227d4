"""Files at an address: reading, and a cache that all processes of a machine share."""
