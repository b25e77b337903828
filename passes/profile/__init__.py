"""What calibration measured, and what follows from it."""
