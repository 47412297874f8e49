"""The instances, as far as they take IO: reports, gauges, failures and recoveries."""
