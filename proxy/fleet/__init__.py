"""IO with the instances: probes, reports, gauges, failures and recoveries."""
