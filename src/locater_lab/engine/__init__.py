"""What papers share: claims and verdicts, training runs and arms, pages and figures."""
