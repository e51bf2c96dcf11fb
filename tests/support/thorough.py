"""What `make test` does not wait for: longer proofs of what shorter tests show, for `make test-thorough`.

A key is a test. Its value says what of it stays in `make test`: so many of its parameters, or those of these
names; with 0 nothing stays. CI runs both. A test is listed with what shows the same property sooner.
"""

from collections import Counter
from collections.abc import Iterable

import pytest

THOROUGH: dict[str, int | tuple[str, ...]] = {
    # each verb has a test of its own; the first line of README.md stays
    "test_readme.py::test_command_lines_run_as_they_stand": 0,
    # mypy reads torch for a minute; the names themselves are compared in this file
    "test_lazy.py::test_a_type_checker_knows_every_name_and_no_other": 0,
    # one of each kind of state; golden/test_golden.py shows the digits of all
    "golden/test_old_checkpoints.py::test_an_old_checkpoint_is_resumed_to_the_bit": ("msamp-o3",),
    # test_coordinator.py stops and names ranks without torchrun
    "distributed/test_stop.py::test_a_rank_that_never_arrives_is_named_with_the_stacks_of_all": 0,
    "distributed/test_stop.py::test_a_rank_in_a_place_without_return_is_ended_when_another_fails": 0,
    "distributed/test_stop.py::test_a_stopped_process_is_found_and_named": 0,
    "distributed/test_coordinator.py::test_a_rank_that_is_killed_is_detected_by_its_silence": ("0",),
    # checkpoint/store kills, fills and slows without a run around it
    "runs/loop/test_checkpointing.py::test_killed_in_the_background": 0,
    "runs/loop/test_checkpointing.py::test_two_ranks_under_torchrun": 0,
    "runs/loop/test_checkpointing.py::test_a_disk_that_is_full_on_one_rank_ends_both_alike": 0,
    "training/step/test_spike.py::test_killed_between_a_rollback_and_the_next_save": 0,
    "training/step/test_spike.py::test_a_warning_changes_nothing": 0,
    "training/step/test_replica_check.py::test_a_replay_changes_nothing": 0,
    "training/config/test_diff.py::test_a_change_that_is_let_through": 0,
    "simulate/test_memory.py::test_the_numbers_are_the_same_wherever_they_lie": 0,
    "runs/monitor/test_memory_check.py::test_a_limit_is_obeyed_before_anything_is_trained": 0,
    "cluster/launch/test_scripts.py::test_a_real_run_saves_at_the_time_limit_and_the_same_script_ends_it": 0,
    "bench/test_bench.py::test_the_command": 0,
    # real processes; the checks themselves, the file and the page are looked at without one
    "bench/test_verify.py::test_a_check_that_breaks_its_process_stops_no_other": 0,
    "bench/test_verify.py::test_the_command_writes_one_file_and_one_page": 0,
    "data/preparation/test_workers.py::test_killed_it_leaves_no_process_and_the_next_makes_the_same_bytes": 0,
    # the first clamps and compensates, which the others do in part
    "kernels/test_remedies.py::test_rows_in_parts_are_the_numbers_of_the_reference": ("cast0",),
    "gpu_budget/test_graph.py::test_a_micro_batch_asks_for_what_the_one_before_it_asked": ("bf16", "fp8"),
    "gpu_budget/test_graph.py::test_from_step_to_step_only_these_are_new_memory": ("fp8-kept1",),
    "nn/test_stacked_experts.py::test_each_expert_computes_as_a_linear_layer_of_its_slice": ("mxfp4",),
    # gpu_budget/ counts native products of a real step
    "bench/test_bench.py::test_native_products_are_counted_in_their_own_format": 0,
    # nn/test_compile.py compares fp8 and mxfp4, whose casts are operators there, too
    "kernels/test_cast_operator.py::test_a_graph_of_operators_gives_the_eager_numbers": 0,
    # its graph is the one that the test above runs; its size is what compiling costs
    "kernels/test_cast_operator.py::test_no_cast_is_unrolled_in_a_graph": 0,
    # nn/test_experts.py restores experts under each recipe
    "training/step/test_train_state.py::test_a_restored_state_goes_on_to_the_same_bits": 2,
    # one of each path: high precision, native, kernels, plain operations; one count is what all of them have
    "cluster/plan/test_counted.py::test_no_recipe_is_expected_to_be_faster_than_its_best": (
        "fp32",
        "fp8",
        "nvfp4",
        "fp4",
    ),
    # plans of real models; one of them stays
    "test_plan_pages.py::test_a_row_is_made_by_its_command": 1,
    "test_plan_pages.py::test_the_page_of_plans_shows_what_its_commands_print": 0,
    # what fits is tested with smaller models
    "cluster/plan/test_plan.py::test_8b_in_fp8_does_not_fit_on_one_h200": 0,
    # mxfp8 is counted there, fp8 with all its figures; each of these takes ten seconds
    "gpu_budget/test_budgets.py::test_emulation_at_1_5b": ("mxfp8-1.25",),
    "gpu_budget/test_budgets.py::test_msamp_at_1_5b": 0,
    "simulate/test_memory_on_gpu.py::test_the_account_is_what_a_gpu_holds": ("fp8", "bf16"),
    "runs/use/test_trained_model.py::test_the_newest_model_gives_the_recorded_loss": ("stochastic forward",),
    # the interpreter shows the numbers; registers change with a kernel only
    "kernels/test_machine_code.py::test_every_kernel_compiles_without_spilling_registers": 0,
    "kernels/test_model_with_kernels.py::test_loss_and_all_gradients": 0,
    # rows of the table of faults that take ten seconds and more; `make faults` runs them, too
    "faults/test_campaigns.py::test_kills_leave_no_trace": 0,
    "faults/test_elastic.py::test_the_state_is_the_same_bits_on_any_number_of_ranks": 0,
    "faults/test_data.py::test_a_malformed_line_is_named_or_set_aside": 0,
    "faults/test_numerics.py::test_one_bad_step_and_two_hundred_good_ones": 0,
    # a trainer in processes of its own; the plugs' other tests, and ranks of distributed/, show its parts
    "integrations/test_two_processes.py::test_trainer": 0,
    "integrations/test_two_processes.py::test_trainer_with_fsdp2_is_refused": 0,
    "integrations/test_two_processes.py::test_lightning": 0,
    "integrations/test_two_processes.py::test_fabric_as_one_process_with_all_sequences": 0,
    "integrations/test_torchtitan.py::test_one_process": 0,
    "integrations/test_torchtitan.py::test_the_program_of_the_page": 0,
    # other recipes, shapes and seeds of the same code
    "quantization/test_quantize.py::test_equals_the_oracle_bit_for_bit": ("wide",),
    "nn/test_snr.py::TestCompiled::test_there_is_no_graph_break_and_nothing_changes": 0,
    "nn/test_compile.py::test_a_traced_model_is_the_eager_one_bit_for_bit": 0,
    "kernels/test_cast.py::test_equals_the_reference_bit_for_bit": 4,
    "kernels/test_cast.py::test_every_rounding_takes_the_same_bits": 3,
    "kernels/test_head_loss.py::test_as_head_and_loss_apart": 2,
    "kernels/test_head_loss.py::test_the_size_of_a_chunk_changes_neither_loss_nor_dh": 2,
    "kernels/test_head_loss.py::test_a_power_of_two_from_above_scales_every_bit": 2,
    "kernels/test_adamw.py::test_the_kernel_is_its_reference": 2,
    "kernels/test_adamw.py::test_the_optimizer_with_kernels_is_torchs_to_the_last_digit": 2,
    "optim/test_adamw.py::test_a_model_learns_as_in_fp32": 2,
    "runs/loop/test_loop.py::test_recomputing_changes_no_bit": 0,
    "runs/loop/test_loop.py::test_the_schedule_is_kept": 2,
    "runs/loop/test_disk_space.py::test_a_record_that_cannot_be_written_ends_nothing": 0,
    "runs/loop/test_data.py::test_a_run_that_keeps_documents_apart_is_the_same_for_any_micro_batch": 0,
    "runs/use/test_export.py::test_a_run_under_any_recipe_opens_in_transformers": 0,
    "runs/use/test_export.py::test_a_run_starts_from_imported_weights": ("msamp-o3",),
    "runs/use/test_export.py::test_nothing_half_written_has_the_final_name": 1,
    "runs/use/test_convert.py::test_the_numbers_stay": 0,
    "simulate/test_memory.py::test_expected_state_is_the_runs": ("fp8", "msamp-o3"),
    "simulate/test_memory.py::test_what_lies_on_the_host_is_told_apart": 1,
    "training/step/test_recipes.py::test_a_run_repeats_and_goes_on_to_the_same_digits": 0,
    "cluster/plan/test_plan.py::test_a_few_layers_tell_what_many_take": 1,
    "cluster/plan/test_published.py::test_wide_rows": 2,
    "cluster/launch/test_scripts.py::test_torchrun_hands_the_signal_on_and_says_75_when_the_run_has_saved": 0,
    "distributed/test_parity.py::test_a_tied_head_learned_positions_and_documents_kept_apart": 2,
    "distributed/test_wire.py::test_scales_are_a_small_part": 1,
    "distributed/test_wire.py::test_sums_of_gradients_that_are_cut": 1,
    "distributed/test_wire.py::test_gathers_of_weights": 2,
    "distributed/test_wire.py::test_sums_of_gradients_of_replicas": 1,
    "distributed/test_quantized_gather.py::test_two_ranks_compute_as_one": 3,
    "distributed/test_quantized_gather.py::test_three_ranks_with_rows_that_do_not_divide": 1,
    "checkpoint/store/test_manifest.py::test_every_flipped_bit_is_found": 2,
    "checkpoint/interop/test_compressed_tensors.py::test_the_package_reads_the_numbers_of_training": 3,
    "nn/test_compile.py::test_a_traced_model_with_narrow_attention_trains_as_the_eager_one": 0,
    # each compiles for seconds; nn/test_compile.py and quantization/test_quantize.py keep one
    "quantization/test_quantize.py::test_compiled_emulation_is_bit_identical": 0,
    "nn/test_snr.py::TestCompiled::test_recomputation_within_compiled_code": 0,
    "nn/test_compile.py::test_inductors_layers_are_the_eager_ones_bit_for_bit": (
        "fp8",
        "mxfp8",
        "mxfp4",
        "nvfp4",
    ),
    "nn/test_compile.py::test_a_model_is_compiled_with_the_roundings_of_the_eager_one": 0,
    "nn/test_native.py::test_it_compiles_whole": 0,
    "formats/test_rounding.py::test_compiled_rounding_is_bit_identical": 0,
    "nn/test_own_loop.py::test_compiled": 0,
    "nn/test_compile.py::test_random_bits_go_on_without_compiling_anew": 0,
    "nn/test_histories.py::test_steps_that_end_in_compiled_code": 0,
    # other formats and blocks of one choice
    "quantization/test_candidates.py::test_equals_the_oracle_bit_for_bit": 1,
    # test_time_obeys_its_ceilings plans, too
    "cluster/plan/test_plan.py::test_a_mesh_too_large_to_try_is_planned_in_a_moment": 0,
    "cli/test_verbs.py::test_plan_says_what_fits_and_what_would_help": 0,
    # counts on tensors without numbers; bench/test_bench.py keeps one of each class
    "bench/test_bench.py::test_recomputed_blocks_do_their_forward_products_again": 0,
    "bench/test_bench.py::test_narrow_state_moves_less": 0,
    # the README's lines prepare, train, compare and go on
    "cli/test_prepare.py::test_text_is_prepared_and_trained_on": 0,
    "cli/test_compare.py::test_a_variant_in_a_sweep_from_a_file": 0,
    # experiment/ and runs/use/test_branch.py prove its parts in this process
    "cli/test_ladder.py::test_it_is_the_same_after_a_kill": 0,
    "cli/test_ladder.py::test_a_gate_accepts_and_refuses_at_the_highest_rung": 0,
    "cli/test_ladder.py::test_a_run_that_diverges_beside_others_is_a_row_and_fails_the_gate": 0,
    "runs/use/test_branch.py::test_a_branch_is_the_shorter_run_bit_for_bit": 0,
    # test_every_difference_is_told and test_another_recipe stay
    "training/config/test_diff.py::test_the_order_of_the_data_goes_on_under_another_batch_size": 0,
    "training/config/test_diff.py::test_older_checkpoints_stay_the_runs_own": 0,
    "training/config/test_diff.py::test_another_text_of_the_recipe": 0,
    "runs/monitor/test_gauges.py::test_lines_after_the_checkpoint_are_made_again": 0,
    "runs/monitor/test_gauges.py::test_a_step_that_is_skipped_is_read_all_the_same": 0,
    "runs/monitor/test_profiler.py::test_a_run_that_ends_early_tells_of_the_steps_there_were": 0,
    "training/step/test_spike.py::test_a_skipped_spike_leaves_weights_and_moments": 0,
    # a kill, a full disk or a damaged file in a whole run; checkpoint/store shows it without one
    "faults/test_signals.py::test_asked_to_stop_it_saves_once_and_the_same_line_goes_on": 0,
    "faults/test_damage.py::test_one_flipped_bit_in_each_file_of_the_newest_checkpoint": 0,
    "faults/test_damage.py::test_a_checkpoint_of_another_run_is_passed_over": 0,
    "faults/test_data.py::test_a_file_without_a_record_is_refused": 0,
    "runs/loop/test_checkpointing.py::test_saves_that_fail_are_told_and_too_many_end_it": 0,
    "runs/loop/test_disk_space.py::test_the_planned_space_of_a_checkpoint_is_that_of_its_files": 0,
    "runs/loop/test_disk_space.py::test_a_directory_that_went_away_ends_it": 0,
    "checkpoint/store/test_async_save.py::test_a_slow_disk_does_not_hold_the_step_and_a_second_save_waits": 0,
    "checkpoint/store/test_async_save.py::test_the_end_of_a_process_waits_for_its_save": 0,
    # torchrun around what test_coordinator.py and test_parity.py show by themselves
    "distributed/test_stop.py::test_when_one_process_is_killed_torchrun_ends_the_others": 0,
    "distributed/test_coordinator.py::test_something_else_at_the_port_is_an_error": 0,
    "distributed/test_memory.py::test_two_ranks_take_what_is_expected": 0,
    "distributed/test_train.py::test_fp4_is_trained_by_two_processes": 0,
    "distributed/test_parity.py::test_recomputed_stages_draw_the_same_random_bits": 0,
    "distributed/test_parity.py::test_dropout_z_loss_and_the_norm_of_heads": 0,
    "cluster/launch/test_scripts.py::test_torchrun_starts_two_processes_that_meet": 0,
    # whole runs of what a test of the step shows
    "training/step/test_spike.py::test_a_rollback_goes_on_with_other_data": 0,
    "training/step/test_recipes.py::test_a_rule_holds_from_its_share_of_the_run_on": 0,
    "runs/loop/test_data.py::test_a_model_learns_the_same_from_text_and_from_every_token_file": 0,
    "runs/loop/test_loop.py::test_the_recipe_moves_the_losses": 0,
    "runs/use/test_convert.py::test_a_stopped_run_goes_on": 0,
    "runs/use/test_convert.py::test_a_checkpoint_of_other_formats_is_refused_with_both_named": 0,
    "training/config/test_diff.py::test_another_recipe": 0,
    "training/config/test_diff.py::test_what_is_not_named_stays_refused": 0,
    "training/config/test_diff.py::test_what_cannot_be_restored_changes_nothing": 0,
    "runs/monitor/test_gauges.py::test_they_may_be_switched_on_in_a_run_that_goes_on": 0,
    "runs/monitor/test_hardware.py::test_memory_that_was_freed_is_used_again_without_the_kernel": 0,
    "runs/monitor/test_memory_check.py::test_what_is_cheaper": 0,
    "runs/monitor/test_profiler.py::test_the_trace_has_the_steps_that_were_asked_for": 0,
    "runs/monitor/test_profiler.py::test_the_classes_make_up_the_step": 0,
    "runs/monitor/test_profiler.py::test_to_be_watched_changes_no_number": 0,
    "experiment/test_gate.py::test_the_exit_code_is_the_word": 0,
    "report/page/test_page.py::test_the_page_stays_under_five_megabytes": 0,
    "cli/test_verbs.py::test_a_limit_ends_a_run_before_it_begins": 0,
    "cli/test_arguments.py::test_the_same_line_finds_a_run_under_an_older_name": 0,
    "cli/test_other_systems.py::test_the_library_and_the_doctor_work_and_a_run_is_refused": 0,
    # plans of seconds; test_time_obeys_its_ceilings stays
    "golden/test_golden.py::test_outputs": ("words", "exports", "report"),
    "cluster/plan/test_plan.py::test_what_does_not_fit_is_told_what_would_help": 0,
    "cluster/plan/test_plan.py::test_what_nobody_gave_is_chosen_and_said": 0,
    "cluster/plan/test_plan.py::test_links_between_nodes_are_waited_for": 0,
    # compiled or executed whole
    "nn/test_gemm.py::test_a_cpu_without_bf16_multiplies_in_fp32": 0,
    "kernels/test_head_loss.py::test_a_compiled_model_has_it_in_one_graph": 0,
    "test_fp8_in_100_lines.py::test_it_prints_what_the_page_shows_but_for_the_digits": 0,
    "test_fp8_in_100_lines.py::test_it_learns": 0,
    "test_fp8_in_100_lines.py::test_it_is_what_convert_computes": 0,
    # other keys, recipes and grids of the same code, as seen in the first ones
    "quantization/test_scale_keys.py::test_equals_the_oracle_bit_for_bit": 6,
    "quantization/test_scale_keys.py::test_rounded_scales_take_the_bits_of_their_stream": 2,
    "quantization/test_center.py::test_equals_the_oracle_bit_for_bit": 3,
    "quantization/test_projection.py::test_equals_the_oracle_bit_for_bit": 2,
    "quantization/test_free_keys.py::test_equals_the_oracle_bit_for_bit": 3,
    "nn/test_attention.py::test_narrow_attention_is_that_of_loops": 2,
    "nn/test_huggingface.py::test_every_recipe_trains_every_model": 4,
    "runs/loop/test_raising.py::test_kills_around_a_raise_leave_no_trace": 0,
    "runs/loop/test_raising.py::test_what_fits_again_is_lowered_again": 0,
    "runs/loop/test_raising.py::test_a_place_is_wide_for_as_long_as_is_said": 0,
    "runs/loop/test_raising.py::test_what_would_still_be_lost_stays_wide": 0,
    "runs/loop/test_raising.py::test_what_a_checkpoint_had_lost_is_raised_from_an_older_one": 0,
    "runs/loop/test_raising.py::test_state_is_cast_again_and_the_rest_keeps_its_bits": 2,
    "golden/test_golden.py::test_digits": 10,
    "cli/test_first_moment.py::test_a_run_that_is_asked_in_its_first_second_ends_with_75": 0,
    "kernels/test_linear.py::test_the_same_numbers_with_kernels_and_without": 4,
    "optim/test_ms_amp.py::test_every_epoch_ends_lower": 0,
    "training/step/test_spike.py::test_a_rollback_without_a_checkpoint_is_a_skip": 0,
    "nn/test_weight_state.py::test_compiled_code_goes_around_it": 0,
    "analysis/test_sensitivity.py::test_dropout_and_z_loss_are_left_out": 0,
    "runs/monitor/test_profiler.py::test_a_number_of_steps_that_is_none": 0,
    "test_conformance.py::test_the_oracle_makes_these_inputs_and_one_vector_of_every_cast_and_option": 0,
    "golden/test_resolved.py::test_a_recipe_resolves_to_what_it_did": 8,
    "distributed/test_parity.py::test_two_processes_train_as_one": 2,
    "distributed/test_parity.py::test_experts": 1,
    # distributed/test_experts.py compares one layer, to the bit
    "distributed/test_parity.py::test_experts_on_different_processes": 1,
    "distributed/test_parity.py::test_wide_experts_on_different_processes": 0,
    "distributed/test_experts.py::test_a_checkpoint_is_resumed_to_the_bit_and_by_one_process": 0,
    "distributed/test_parity.py::test_rows_that_cannot_be_shared_out_evenly": 1,
    "distributed/test_parity.py::test_keys_of_casts_mean_the_global_tensor": 1,
    "distributed/test_parity.py::test_attention_and_the_stream_mean_the_global_tensor": 1,
    "distributed/test_parity.py::test_sums_in_narrow_numbers_are_near": 1,
    "distributed/test_parity.py::test_what_the_page_promises_to_the_last_bit": 1,
    "distributed/test_parity.py::test_overflow_is_everyones": 1,
    "distributed/test_parity.py::test_muon_makes_the_whole_momentum_orthogonal": 1,
    "distributed/test_parity.py::test_narrow_weights_that_every_process_of_a_tensor_group_has": 1,
    "distributed/test_train.py::test_a_run_goes_on_on_another_number_of_processes": 0,
    "distributed/test_data_parallel.py::test_ddp_of_a_prepared_model_trains_as_the_package": 1,
    "distributed/test_data_parallel.py::test_fsdp_trains_as_one_process": 1,
    "kernels/test_cast.py::test_free_keys_equal_the_reference_bit_for_bit": 4,
    "kernels/test_head_loss.py::test_with_a_z_loss_as_head_and_loss_apart": 2,
    "checkpoint/store/test_ranks.py::test_killed_at_any_point_of_any_rank_the_old_or_the_new_one_is_whole": 8,
    "training/step/test_nan_tracer.py::test_a_bad_step_is_as_if_it_had_never_been": 1,
    "bench/test_bench.py::test_casts_move_what_they_read_and_write": 0,
    "analysis/test_probe.py::test_exact_arithmetic_has_no_error": 0,
    "analysis/test_search.py::test_a_check_compares_the_answer_with_bf16_and_with_each_baseline": 0,
    "analysis/test_search.py::test_the_command_writes_a_recipe_that_trains": 0,
    "runs/use/test_export.py::test_what_a_model_says_of_its_special_tokens_survives": 0,
    "nn/test_weight_state.py::test_any_products_go_with_any_state": 0,
    "nn/test_weight_state.py::test_nothing_is_kept_after_the_backward_pass": 0,
    "runs/monitor/test_gauges.py::test_every_layer_and_place_is_read_once_a_step": 0,
    "cli/test_compare.py::test_a_run_that_fails_is_a_result_and_the_others_go_on": 0,
    "faults/test_kill.py::test_a_kill_inside_a_save_leaves_no_trace": 1,
    "data/preparation/test_workers.py::test_the_same_bytes_whatever_the_number_of_workers": 0,
    "runs/loop/test_raising.py::test_the_place_that_broke_is_widened_and_the_run_goes_on": 0,
    "runs/loop/test_raising.py::test_it_is_written_down_as_a_rule_of_the_recipe": 0,
    "runs/loop/test_raising.py::test_whoever_opens_the_run_sees_the_wider_place": 0,
    "cluster/plan/test_plan.py::test_the_command": 0,
    "runs/monitor/test_memory_check.py::test_a_model_larger_than_the_machine_is_refused": 0,
    "runs/monitor/test_gauges.py::test_not_a_bit_of_the_trajectory_changes": 0,
    "analysis/test_sensitivity.py::test_every_layer_has_every_place": 0,
    "checkpoint/store/test_commit.py::test_files_are_synced_then_renamed_then_the_directory_is_synced": 0,
    "distributed/test_coordinator.py::test_missing_ranks_are_named_once": 0,
    "test_command_lines.py::test_every_line_of_narrowgauge_can_start": 0,
    "runs/use/test_scores.py::test_a_damaged_file_is_refused": 1,
    "runs/use/test_scores.py::test_a_wrong_line_is_named": 1,
}


def mark_thorough(items: Iterable[pytest.Item]) -> None:
    """Mark what is listed here."""
    seen: Counter[str] = Counter()
    for item in items:
        name, _, parameters = item.nodeid.removeprefix("tests/").partition("[")
        if name in THOROUGH and not any(item.iter_markers("slow")):
            stays = THOROUGH[name]
            seen[name] += 1
            words = parameters.removesuffix("]").split("-")
            if seen[name] > stays if isinstance(stays, int) else not any(_is_in(s, words) for s in stays):
                item.add_marker(pytest.mark.thorough)


def _is_in(name: str, words: list[str]) -> bool:
    """Whether a parameter's id, in words, has this name: "fp8-delayed" is in "fp8-delayed-True"."""
    parts = name.split("-")
    return any(words[i : i + len(parts)] == parts for i in range(len(words)))
