"""A chat without a screen: what is sent to the model, the answer as it grows, the session it is kept in."""
