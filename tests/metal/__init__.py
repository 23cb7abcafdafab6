"""Metal kernels compiled for the CPU: threads are fibers, and conversions are as explicit as in Metal."""
