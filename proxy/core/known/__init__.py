"""What is known of the fleet: the parts that decisions read, in one owner."""
