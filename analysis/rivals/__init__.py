"""Other routers' rules, as policies of the league."""
