"""What crosses from the forward to the backward: found, judged by its readers, stored smaller."""
