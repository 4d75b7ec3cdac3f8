"""Scans of many checkpoints into one folder of Parquet parts: `locater fleet` and `locater.Fleet`."""
