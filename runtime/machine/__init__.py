"""What this machine is and can do: hardware, chip table, memory bandwidth, memory budget."""
