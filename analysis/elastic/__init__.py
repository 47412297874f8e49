"""`analyze elastic`: the experiment of the design that offloading began with."""
