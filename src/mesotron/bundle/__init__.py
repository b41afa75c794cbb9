"""A folder of wheels and files for a GPU machine without network, as many clusters have."""
