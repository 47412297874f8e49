"""The reverse proxy's shell: IO, one file per outside thing; decisions live in `proxy.core`."""
