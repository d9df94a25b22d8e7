"""The wire between frontends and workers: values and rules; no sockets, no clock."""
