"""What overrides textual's insides, each with its reason. Works for the pinned textual only."""
