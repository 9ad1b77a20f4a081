"""An engine with pipeline ranks, small enough to run whole: scheduler, block tables, workers, models."""
