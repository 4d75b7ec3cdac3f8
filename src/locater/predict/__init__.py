"""What layers read (mean and covariance), and what follows for their heads."""
