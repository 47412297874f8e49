"""The process: periodic tasks, reload, drain, hot restart, memory."""
