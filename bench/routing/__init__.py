"""Routing quality beside other routers, on engines that are not the project's own."""
