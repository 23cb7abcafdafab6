"""`headrace verify`: whether an answer depends on who is beside it, on this machine and with this model."""
