"""Several processes that run one command together: a worker of a group, and the launcher of one on this machine."""
