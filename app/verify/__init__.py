"""`headrace verify`: checks that an answer is the same alone and in a batch, on this machine."""
