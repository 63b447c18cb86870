"""What every report has."""

FIELDS = {
    "parameters", "trainable_parameters", "steps", "losses", "step_seconds", "tokens_per_second", "flops_per_second",
    "hardware_flops_per_second", "device_peak_bytes", "host_peak_bytes", "host_baseline_bytes",
    "ssd_read_bytes_per_step", "ssd_written_bytes_per_step", "planned_ssd_read_bytes_per_step",
    "planned_ssd_written_bytes_per_step", "bound_seconds", "overlap_efficiency",
    "network_sent_bytes_per_step", "planned_network_sent_bytes_per_step", "clip_by", "clipped_steps",
    "updated_again_steps", "watched", "way",
}  # fmt: skip
