"""The protocol for Gluon's nets and trainers."""
