"""One safe step, for both frontends: check → apply or skip → adjust.

=================  ================================================================================
``scaler``         the loss scale: static, dynamic or none
``gradients``      finite check, norm, unscale; the wait of a step for its device
``statistics``     running statistics that an overflow cannot poison
``multi_tensor``   one operator for many arrays
``masters``        FP32 masters of float16 weights
``updater``        every optimizer of MXNet on the masters, the loss scale divided out
``step``           one scaled step and what it remembers
``phase``          the phases of a trainer between two steps
``states``         all of that saved and continued from; ``state_file`` on disk, ``state_layout`` in memory
``stores``         kvstores, which sum gradients over devices and workers
=================  ================================================================================
"""
