#include "scan.h"

#include <stdbool.h>

#define TO_BRACE 0x20u /* maps "[" and "{" to "{", and no other byte */
#define MULTIPLIER 0x9E3779B97F4A7C15u

/* At most 255 bytes at once, so that each count fits in one byte: compilers vectorize this. */
Marks scan_marks(const uint8_t *body, size_t length) {
    Marks all = {0};
    for (size_t at = 0; at < length; at += 255) {
        size_t end = length - at < 255 ? length - at : 255;
        uint8_t brackets = 0, quotes = 0, commas = 0;
        for (size_t n = 0; n < end; n++) {
            uint8_t byte = body[at + n];
            brackets += (uint8_t)((byte | TO_BRACE) == '{');
            quotes += byte == '"';
            commas += byte == ',';
        }
        all.brackets += brackets;
        all.quotes += quotes;
        all.commas += commas;
    }
    return all;
}

Marks scan_marks_outside(const uint8_t *body, size_t length, size_t max_quotes) {
    Marks found = {0};
    bool is_inside = false;
    for (size_t at = 0; at < length && found.quotes <= max_quotes; at++) {
        uint8_t byte = body[at];
        if (byte == '\\') {
            at += at + 1 < length && (body[at + 1] == '"' || body[at + 1] == '\\');
        } else if (byte == '"') {
            found.quotes++;
            is_inside = !is_inside;
        } else if (!is_inside) {
            found.brackets += (uint8_t)(byte | TO_BRACE) == '{';
            found.commas += byte == ',';
        }
    }
    return found;
}

void scan_runs(const uint32_t *tokens, size_t count, uint64_t *runs) {
    for (size_t at = 0; at + RUN_TOKENS <= count; at++) {
        uint64_t run = 0;
        for (size_t n = 0; n < RUN_TOKENS; n++) run = run * MULTIPLIER + tokens[at + n];
        runs[at] = run;
    }
}
