"""What all rooms use: reading and writing graphs, layers as matched, schemes."""
