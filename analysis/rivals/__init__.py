"""Rules of other routers, as policies of the league."""
