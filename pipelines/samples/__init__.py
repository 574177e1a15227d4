"""The index of samples, their order in an epoch, and a rank's share."""
