"""The process among others: start, reload, drain, hot restart, memory."""
