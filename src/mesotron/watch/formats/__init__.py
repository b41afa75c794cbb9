"""Log formats, one file each. A file in this folder is a format; no list elsewhere names it."""
