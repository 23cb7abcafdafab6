"""Live decode metrics, computed from the engine's events; no widgets."""
