# The data of AceCoder's recipes; sourced by them.
make_data() {
    local tool=()
    [ "$USE_TOOL" = false ] || tool=(--add_execution_prompt --without_tool)
    [ "$PROFILE" = gpu ] || {
        python examples/train/acecoder/one_liners.py --output "$DATASET"
        tool+=(--no_system_prompt)
    }
    python examples/data_preprocess/acecoder.py --dataset_path "$DATASET" --local_dir "$DATA" \
        --test_size "$TEST_SIZE" ${tool[@]+"${tool[@]}"}
}
