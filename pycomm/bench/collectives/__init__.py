"""`pycomm bench collectives`."""
