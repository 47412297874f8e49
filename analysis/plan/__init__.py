"""`analyze plan`: planners in virtual time, beside fixed fleets and a clairvoyant."""
