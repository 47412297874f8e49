"""The process among others: periodic tasks, reload, drain, hot restart, memory."""
