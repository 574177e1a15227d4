"""Files at an address: reading, a cache that all processes of a machine share, and downloads ahead."""
