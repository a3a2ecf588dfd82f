"""Private: forming a group: the rendezvous, the survivors' agreement, stored thresholds."""
