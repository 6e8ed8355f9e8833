"""Moving what overflows again and again to FP32."""
