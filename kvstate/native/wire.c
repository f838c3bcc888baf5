#include "wire.h"

/* A reader never goes past `end`; once it has failed, it stays failed and yields zeros. */
typedef struct {
    const unsigned char *at, *end;
    bool failed;
} Reader;

typedef struct {
    const unsigned char *at;
    size_t length;
} Text;

static uint64_t fail(Reader *reader) {
    reader->failed = true;
    return 0;
}

static uint64_t big_endian(Reader *reader, size_t width) {
    if ((size_t)(reader->end - reader->at) < width) return fail(reader);
    uint64_t value = 0;
    for (size_t n = 0; n < width; n++) value = value << 8 | reader->at[n];
    reader->at += width;
    return value;
}

static unsigned peek(const Reader *reader) {
    return reader->failed || reader->at == reader->end ? 0xc1 : *reader->at; /* 0xc1: never used */
}

static bool take_nil(Reader *reader) {
    if (peek(reader) != 0xc0) return false;
    reader->at++;
    return true;
}

/* The length of an array or a map, by its three tags; fails for anything else. */
static size_t take_length(Reader *reader, unsigned fix, unsigned wide16, unsigned wide32) {
    unsigned tag = peek(reader);
    if (tag == 0xc1) return fail(reader);
    reader->at++;
    if ((tag & 0xf0) == fix) return tag & 0xf;
    if (tag == wide16) return big_endian(reader, 2);
    if (tag == wide32) return big_endian(reader, 4);
    return fail(reader);
}

static size_t take_array(Reader *reader) { return take_length(reader, 0x90, 0xdc, 0xdd); }

static size_t take_map(Reader *reader) { return take_length(reader, 0x80, 0xde, 0xdf); }

static bool is_array(const Reader *reader) {
    unsigned tag = peek(reader);
    return (tag & 0xf0) == 0x90 || tag == 0xdc || tag == 0xdd;
}

static Text take_bytes(Reader *reader, size_t length) {
    if (reader->failed || (size_t)(reader->end - reader->at) < length)
        return (Text){reader->at, fail(reader)};
    Text text = {reader->at, length};
    reader->at += length;
    return text;
}

/* A text of ASCII: whether others are sound UTF-8 is for the typed decoder to judge. */
static Text take_text(Reader *reader) {
    unsigned tag = peek(reader);
    if (tag == 0xc1) return (Text){reader->at, fail(reader)};
    reader->at++;
    size_t length = (tag & 0xe0) == 0xa0 ? tag & 0x1f
                    : tag == 0xd9        ? big_endian(reader, 1)
                    : tag == 0xda        ? big_endian(reader, 2)
                                         : fail(reader);
    Text text = take_bytes(reader, length);
    unsigned char every = 0;
    for (size_t n = 0; n < text.length; n++) every |= text.at[n];
    if (every & 0x80) fail(reader);
    return text;
}

/* Any integer as its 64 bits. */
static uint64_t take_integer(Reader *reader) {
    unsigned tag = peek(reader);
    if (tag == 0xc1) return fail(reader);
    reader->at++;
    if (tag < 0x80) return tag;
    if (tag >= 0xe0) return (uint64_t)(int64_t)(int8_t)tag;
    switch (tag) {
        case 0xcc: return big_endian(reader, 1);
        case 0xcd: return big_endian(reader, 2);
        case 0xce: return big_endian(reader, 4);
        case 0xcf: return big_endian(reader, 8);
        case 0xd0: return (uint64_t)(int64_t)(int8_t)big_endian(reader, 1);
        case 0xd1: return (uint64_t)(int64_t)(int16_t)big_endian(reader, 2);
        case 0xd2: return (uint64_t)(int64_t)(int32_t)big_endian(reader, 4);
        case 0xd3: return big_endian(reader, 8);
        default: return fail(reader);
    }
}

/* An integer from 0 to limit; fails for others, negative ones too. */
static uint64_t take_count(Reader *reader, uint64_t limit) {
    unsigned tag = peek(reader);
    bool negative = tag >= 0xe0 || (tag >= 0xd0 && tag <= 0xd3);
    uint64_t value = take_integer(reader);
    return negative || value > limit ? fail(reader) : value;
}

static uint64_t take_hash(Index *index, Reader *reader) {
    unsigned tag = peek(reader);
    if (tag != 0xc4 && tag != 0xc5) return take_integer(reader);
    reader->at++;
    Text bytes = take_bytes(reader, big_endian(reader, tag == 0xc4 ? 1 : 2));
    return reader->failed ? 0 : wire_fold_hash(index, bytes.at, bytes.length);
}

/* Steps over one value of any type, however deeply nested, without recursion. */
static void skip(Reader *reader) {
    for (uint64_t left = 1; left && !reader->failed; left--) {
        unsigned tag = peek(reader);
        if (tag == 0xc1) {
            fail(reader);
        } else if (is_array(reader)) {
            left += take_array(reader);
        } else if ((tag & 0xf0) == 0x80 || tag == 0xde || tag == 0xdf) {
            left += 2 * (uint64_t)take_map(reader);
        } else if ((tag & 0xe0) == 0xa0 || (tag >= 0xd9 && tag <= 0xda)) {
            take_text(reader);
        } else if (tag < 0x80 || tag >= 0xe0 || tag == 0xc0 || tag == 0xc2 || tag == 0xc3) {
            reader->at++;
        } else if (tag == 0xc4 || tag == 0xc5) {
            reader->at++;
            take_bytes(reader, big_endian(reader, tag == 0xc4 ? 1 : 2));
        } else if (tag >= 0xca && tag <= 0xd3) {
            static const unsigned char widths[] = {4, 8, 1, 2, 4, 8, 1, 2, 4, 8};
            reader->at++;
            take_bytes(reader, widths[tag - 0xca]);
        } else {
            fail(reader); /* extensions and huge texts: no engine sends them */
        }
    }
}

static bool text_is(Text text, const char *word) {
    return text.length == strlen(word) && !memcmp(text.at, word, text.length);
}

/* Makes room for `more` items behind `count`; both are bounded by the length of the payload. */
static bool make_room(void **array, size_t *room, size_t count, size_t more, size_t size) {
    if (count + more <= *room) return true;
    size_t wanted = 2 * (count + more) + 64;
    void *grown = realloc(*array, wanted * size);
    if (!grown) return false;
    *array = grown;
    *room = wanted;
    return true;
}

void wire_free(WireBatch *batch) {
    free(batch->events);
    free(batch->hashes);
    free(batch->tokens);
}

uint64_t wire_fold_hash(Index *index, const unsigned char *bytes, size_t length) {
    return index_hash_bytes(index, bytes, length);
}

uint64_t wire_lora(Index *index, const unsigned char *name, size_t length) {
    return index_hash_bytes(index, name, length);
}

static const struct {
    const char *name;
    uint32_t tier;
} media[] = {
    {"GPU", 0},  {"CPU", 1},     {"CPU_PINNED", 1}, {"CPU_TIER1", 1}, {"DISK", 2},    {"NVME", 2},
    {"STORAGE", 2}, {"CPU_TIER2", 2}, {"EXTERNAL", 3},   {"REMOTE", 3},    {"NETWORK", 3}, {"SHARED", 3},
};

bool wire_medium(const unsigned char *name, size_t length, uint32_t *medium, uint32_t *tier) {
    Text text = {name, length};
    for (uint32_t n = 0; n < sizeof media / sizeof *media; n++) {
        if (text_is(text, media[n].name)) {
            *medium = n;
            *tier = media[n].tier;
            return true;
        }
    }
    return false;
}

/* An event's fields while it is read; what was not sent keeps its default. */
typedef struct {
    WireEvent event;
    bool has_hashes, has_tokens;
    size_t token_count;
    Text lora;
    bool has_lora, has_lora_number;
    const unsigned char *extras; /* where extra_keys begins; read when lora and hashes are known */
} Fields;

static bool read_hashes(Index *index, Reader *reader, WireBatch *batch, Fields *fields) {
    size_t count = take_array(reader);
    if (reader->failed || count > (size_t)(reader->end - reader->at)) return !fail(reader);
    if (!make_room((void **)&batch->hashes, &batch->hash_room, batch->hash_count, count,
                   sizeof *batch->hashes))
        return false;
    fields->event.first_hash = batch->hash_count;
    fields->event.hash_count = (uint32_t)count;
    fields->has_hashes = true;
    for (size_t n = 0; n < count; n++)
        batch->hashes[batch->hash_count++] = take_hash(index, reader);
    return true;
}

static bool read_tokens(Reader *reader, WireBatch *batch, Fields *fields) {
    size_t count = take_array(reader);
    if (reader->failed || count > (size_t)(reader->end - reader->at)) return !fail(reader);
    if (!make_room((void **)&batch->tokens, &batch->token_room, batch->token_count, count,
                   sizeof *batch->tokens))
        return false;
    fields->event.first_token = batch->token_count;
    fields->token_count = count;
    fields->has_tokens = true;
    for (size_t n = 0; n < count; n++)
        batch->tokens[batch->token_count++] = (uint32_t)take_count(reader, UINT32_MAX);
    return true;
}

static void read_medium(Reader *reader, PoolName *pool) {
    if (take_nil(reader)) return; /* none: GPU, number 0 */
    Text name = take_text(reader);
    if (reader->failed || !wire_medium(name.at, name.length, &pool->medium, &pool->tier))
        fail(reader);
}

static void read_kind(Reader *reader) {
    if (take_nil(reader)) return;
    Text kind = take_text(reader);
    if (!text_is(kind, "full_attention") && !text_is(kind, "mla_attention") &&
        !text_is(kind, "sink_full_attention"))
        fail(reader); /* its blocks do not hold the whole prefix: the typed decoder counts them */
}

static void read_locality(Reader *reader) {
    if (take_nil(reader)) return;
    if (text_is(take_text(reader), "REMOTE")) fail(reader);
}

/* Reads the field of this name; false where memory is short. */
static bool read_field(Index *index, Reader *reader, Text name, WireBatch *batch, Fields *fields) {
    WireEvent *event = &fields->event;
    if (text_is(name, "block_hashes")) return read_hashes(index, reader, batch, fields);
    if (text_is(name, "token_ids")) return read_tokens(reader, batch, fields);
    if (text_is(name, "parent_block_hash")) {
        event->has_parent = !take_nil(reader);
        if (event->has_parent) event->parent = take_hash(index, reader);
    } else if (text_is(name, "block_size")) {
        event->pool.block_size = (uint32_t)take_count(reader, MAX_BLOCK_SIZE);
    } else if (text_is(name, "medium")) {
        read_medium(reader, &event->pool);
    } else if (text_is(name, "lora_name")) {
        fields->has_lora = !take_nil(reader);
        if (fields->has_lora) fields->lora = take_text(reader);
    } else if (text_is(name, "lora_id")) {
        fields->has_lora_number = !take_nil(reader);
        if (fields->has_lora_number) take_integer(reader);
    } else if (text_is(name, "group_idx")) {
        if (!take_nil(reader)) event->pool.group = (int64_t)take_count(reader, INT64_MAX);
    } else if (text_is(name, "kv_cache_spec_kind")) {
        read_kind(reader);
    } else if (text_is(name, "locality")) {
        read_locality(reader);
    } else {
        if (text_is(name, "extra_keys")) fields->extras = reader->at;
        skip(reader);
    }
    return true;
}

/* Whether extra_keys say no more than the adapter's name: nil, or for each block nil or [name]. */
static bool extras_are_plain(Reader reader, const Fields *fields) {
    if (!fields->extras) return true;
    reader.at = fields->extras;
    if (take_nil(&reader)) return true;
    size_t count = take_array(&reader);
    if (reader.failed || count != fields->event.hash_count) return false;
    for (size_t n = 0; n < count && !reader.failed; n++) {
        if (take_nil(&reader)) continue;
        if (!fields->has_lora || take_array(&reader) != 1) return false;
        Text name = take_text(&reader);
        if (reader.failed || name.length != fields->lora.length ||
            memcmp(name.at, fields->lora.at, name.length))
            return false;
    }
    return !reader.failed;
}

static bool stored_is_sound(const Reader *reader, const Fields *fields) {
    const WireEvent *event = &fields->event;
    return fields->has_hashes && fields->has_tokens && event->hash_count &&
           event->pool.block_size && (fields->has_lora || !fields->has_lora_number) &&
           fields->token_count == (uint64_t)event->hash_count * event->pool.block_size &&
           extras_are_plain(*reader, fields);
}

static const char *const stored_names[] = {
    "block_hashes", "parent_block_hash", "token_ids",  "block_size", "lora_id",
    "medium",       "lora_name",         "extra_keys", "group_idx",  "kv_cache_spec_kind",
};
static const char *const removed_names[] = {"block_hashes", "medium", "group_idx"};

static bool kind_of(Text tag, EventKind *kind) {
    static const char *const tags[] = {"BlockStored", "BlockRemoved", "AllBlocksCleared"};
    for (int n = 0; n < 3; n++) {
        if (text_is(tag, tags[n])) {
            *kind = (EventKind)n;
            return true;
        }
    }
    return false;
}

static Text word(const char *text) { return (Text){(const unsigned char *)text, strlen(text)}; }

/* Reads an event's fields, named or by position. */
static bool read_fields(Index *index, Reader *reader, WireBatch *batch, Fields *fields) {
    bool by_position = is_array(reader);
    size_t count = by_position ? take_array(reader) : take_map(reader);
    if (reader->failed || !count || (!by_position && !text_is(take_text(reader), "type")))
        return !fail(reader); /* every publisher puts the tag first */
    if (!kind_of(take_text(reader), &fields->event.kind)) return !fail(reader);
    bool stored = fields->event.kind == EVENT_STORED;
    size_t known = stored ? sizeof stored_names / sizeof *stored_names
                          : sizeof removed_names / sizeof *removed_names;
    const char *const *names = stored ? stored_names : removed_names;
    for (size_t n = 1; n < count && !reader->failed; n++) {
        Text name = by_position ? word(n <= known ? names[n - 1] : "") : take_text(reader);
        if (!reader->failed && !read_field(index, reader, name, batch, fields)) return false;
    }
    return true;
}

static WireResult read_event(Index *index, Reader *reader, WireBatch *batch) {
    Fields fields = {.event = {.pool = {.group = -1}}};
    if (!read_fields(index, reader, batch, &fields)) return WIRE_NO_MEMORY;
    if (reader->failed) return WIRE_SURPRISE;
    if (fields.event.kind == EVENT_STORED && !stored_is_sound(reader, &fields)) return WIRE_SURPRISE;
    if (fields.event.kind == EVENT_REMOVED && !fields.has_hashes) return WIRE_SURPRISE;
    if (fields.has_lora)
        fields.event.lora = wire_lora(index, fields.lora.at, fields.lora.length);
    if (!make_room((void **)&batch->events, &batch->event_room, batch->event_count, 1,
                   sizeof *batch->events))
        return WIRE_NO_MEMORY;
    batch->events[batch->event_count++] = fields.event;
    return WIRE_OK;
}

WireResult wire_parse(Index *index, const unsigned char *bytes, size_t length, WireBatch *batch) {
    Reader reader = {bytes, bytes + length, false};
    batch->event_count = batch->hash_count = batch->token_count = 0;
    size_t fields = take_array(&reader);
    if (fields != 2 && fields != 3) return WIRE_SURPRISE;
    if (peek(&reader) != 0xcb) return WIRE_SURPRISE;
    reader.at++;
    uint64_t stamp = big_endian(&reader, 8);
    if ((stamp >> 52 & 0x7ff) == 0x7ff) return WIRE_SURPRISE; /* infinite, or no number */
    size_t events = take_array(&reader);
    for (size_t n = 0; n < events && !reader.failed; n++) {
        WireResult result = read_event(index, &reader, batch);
        if (result != WIRE_OK) return result;
    }
    if (fields == 3) skip(&reader);
    return reader.failed || reader.at != reader.end ? WIRE_SURPRISE : WIRE_OK;
}
