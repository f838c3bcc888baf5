#include "wire.h"

#include "reader.h"

static uint64_t take_hash(Index *index, Reader *reader) {
    unsigned tag = peek(reader);
    if (tag != 0xc4 && tag != 0xc5) return take_integer(reader);
    reader->at++;
    Text bytes = take_bytes(reader, big_endian(reader, tag == 0xc4 ? 1 : 2));
    if (bytes.length > MAX_HASH_BYTES) return fail(reader);
    return reader->failed ? 0 : wire_fold_hash(index, bytes.at, bytes.length);
}

/* Makes room for `more` items after `count`; both are bounded by the length of the payload. */
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

/* In the order of kvstate/overlap.py. */
static const struct {
    const char *name;
    uint32_t tier;
} media[] = {
    {"GPU", 0},     {"DEVICE", 0},    {"CPU", 1},      {"CPU_PINNED", 1}, {"CPU_TIER1", 1},
    {"DISK", 2},    {"NVME", 2},      {"STORAGE", 2},  {"CPU_TIER2", 2},  {"EXTERNAL", 3},
    {"REMOTE", 3},  {"NETWORK", 3},   {"SHARED", 3},
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

bool wire_tier_of(uint32_t medium, uint32_t *tier) {
    if (medium >= sizeof media / sizeof *media) return false;
    *tier = media[medium].tier;
    return true;
}

/* An event's fields while it is read; fields not sent keep their defaults. */
typedef struct {
    WireEvent event;
    bool has_hashes, has_tokens, has_block_size;
    size_t token_count;
    Text lora;
    bool has_lora, has_lora_number;
    bool is_state, is_window; /* its kind of attention */
    uint32_t window;
    bool is_remote, is_foreign; /* its locality and its ownership */
    const unsigned char *extras; /* where extra_keys begins; read when lora and hashes are known */
    const unsigned char *images; /* where mm_keys begins; likewise */
} Fields;

static bool read_hashes(Index *index, Reader *reader, WireBatch *batch, Fields *fields) {
    size_t count = take_array(reader);
    if (reader->failed || count > (size_t)(reader->end - reader->at) ||
        count > MAX_HASHES - batch->hash_count)
        return !fail(reader);
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

#define FIRST_WIDE_TOKEN 0x80000000u

/* A token's id; kvstate/overlap.py (`tokens_of`) says what becomes of longer ones. */
static uint32_t take_token(Reader *reader) {
    uint64_t id = take_count(reader, INT64_MAX);
    return id > UINT32_MAX ? FIRST_WIDE_TOKEN | (uint32_t)id : (uint32_t)id;
}

static uint32_t take_copies(Reader *reader) {
    return (uint32_t)take_count(reader, UINT32_MAX);
}

static bool read_numbers(Reader *reader, WireBatch *batch, Fields *fields,
                         uint32_t (*take)(Reader *)) {
    size_t count = take_array(reader);
    if (reader->failed || count > (size_t)(reader->end - reader->at)) return !fail(reader);
    if (!make_room((void **)&batch->tokens, &batch->token_room, batch->token_count, count,
                   sizeof *batch->tokens))
        return false;
    fields->event.first_token = batch->token_count;
    fields->token_count = fields->event.token_count = count;
    fields->has_tokens = true;
    for (size_t n = 0; n < count; n++)
        batch->tokens[batch->token_count++] = take(reader);
    return true;
}

static bool read_tokens(Reader *reader, WireBatch *batch, Fields *fields) {
    return read_numbers(reader, batch, fields, take_token);
}

/* Reads how many copies of each removed block are left; nil if the source does not count them. */
static bool read_lefts(Reader *reader, WireBatch *batch, Fields *fields) {
    if (fields->event.kind != EVENT_REMOVED) return skip(reader), true;
    if (take_nil(reader)) return true;
    fields->event.tells_left = true;
    return read_numbers(reader, batch, fields, take_copies);
}

static void read_medium(Reader *reader, PoolName *pool) {
    pool->medium = pool->tier = 0;
    if (take_nil(reader)) return; /* none: GPU, number 0 */
    Text name = take_text(reader);
    if (reader->failed || !wire_medium(name.at, name.length, &pool->medium, &pool->tier))
        fail(reader);
}

static void read_kind(Reader *reader, Fields *fields) {
    fields->event.group_kind = KIND_UNNAMED;
    if (take_nil(reader)) return;
    Text kind = take_text(reader);
    bool holds_prefix = text_is(kind, "full_attention") || text_is(kind, "mla_attention") ||
                        text_is(kind, "sink_full_attention");
    fields->event.group_kind = holds_prefix ? KIND_PREFIX : KIND_OTHER;
    fields->is_state = text_is(kind, "mamba");
    fields->is_window =
        text_is(kind, "sliding_window") || text_is(kind, "sliding_window_mla");
}

static void read_window(Reader *reader, Fields *fields) {
    fields->window = take_nil(reader) ? 0 : (uint32_t)take_count(reader, MAX_WINDOW);
}

/* Tokens before the end of a prefix that a group must hold, as kvstate/wire/extras.py has it. */
static uint32_t reach_of(const Fields *fields) {
    if (fields->is_state) return 1;
    if (!fields->is_window || !fields->window) return NO_REACH;
    return fields->window > 1 ? fields->window - 1 : 1;
}

static bool read_is_remote(Reader *reader) {
    return !take_nil(reader) && !text_is(take_text(reader), "LOCAL");
}

/* Whether the blocks are a residency agent's. */
static bool read_is_foreign(Reader *reader) {
    static const char agent[] = "kvcr";
    if (take_nil(reader)) return false;
    Text owner = take_text(reader);
    if (reader->failed || owner.length != strlen(agent)) return false;
    for (size_t n = 0; n < owner.length; n++)
        if ((owner.at[n] | 0x20) != agent[n]) return false;
    return true;
}

/* Reads the rare fields of an event. */
static void read_rare_field(Reader *reader, Text name, Fields *fields) {
    if (text_is(name, "kv_cache_spec_kind")) {
        read_kind(reader, fields);
    } else if (text_is(name, "kv_cache_spec_sliding_window")) {
        read_window(reader, fields);
    } else if (text_is(name, "locality")) {
        fields->is_remote = read_is_remote(reader);
    } else if (text_is(name, "ownership")) {
        fields->is_foreign = read_is_foreign(reader);
    } else if (text_is(name, "cache_salt")) {
        if (!take_nil(reader)) fail(reader); /* salted chains are left to the typed decoder */
    } else if (text_is(name, "type")) {
        fail(reader); /* a second one */
    } else {
        if (text_is(name, "extra_keys")) fields->extras = reader->at;
        if (text_is(name, "mm_keys")) fields->images = reader->at;
        skip(reader);
    }
}

/* Reads the field of this name; returns false if out of memory. */
static bool read_field(Index *index, Reader *reader, Text name, WireBatch *batch, Fields *fields) {
    WireEvent *event = &fields->event;
    if (text_is(name, "block_hashes")) return read_hashes(index, reader, batch, fields);
    if (text_is(name, "token_ids")) return read_tokens(reader, batch, fields);
    if (text_is(name, "remaining_copy_counts")) return read_lefts(reader, batch, fields);
    if (text_is(name, "parent_block_hash")) {
        event->has_parent = !take_nil(reader);
        if (event->has_parent) event->parent = take_hash(index, reader);
    } else if (text_is(name, "block_size")) {
        fields->has_block_size = true;
        event->pool.block_size = (uint32_t)take_count(reader, MAX_BLOCK_SIZE);
    } else if (text_is(name, "medium")) {
        read_medium(reader, &event->pool);
    } else if (text_is(name, "lora_name")) {
        event->names_loras = 1;
        fields->has_lora = !take_nil(reader);
        if (fields->has_lora) fields->lora = take_text(reader);
    } else if (text_is(name, "lora_id")) {
        fields->has_lora_number = !take_nil(reader);
        if (fields->has_lora_number) take_integer(reader);
    } else if (text_is(name, "group_idx")) {
        event->pool.group = NO_GROUP;
        if (!take_nil(reader)) event->pool.group = (int64_t)take_count(reader, UINT32_MAX);
    } else {
        read_rare_field(reader, name, fields);
    }
    return true;
}

/* Whether extra_keys hold only the adapter's name: nil, or for each block nil or [name]. */
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

/* Whether mm_keys are empty: nil, or for each block nil or []. */
static bool images_are_none(Reader reader, const Fields *fields) {
    if (!fields->images) return true;
    reader.at = fields->images;
    if (take_nil(&reader)) return true;
    size_t count = take_array(&reader);
    if (reader.failed || count != fields->event.hash_count) return false;
    for (size_t n = 0; n < count && !reader.failed; n++)
        if (!take_nil(&reader) && take_array(&reader)) return false;
    return !reader.failed;
}

static bool stored_is_sound(const Reader *reader, const Fields *fields) {
    const WireEvent *event = &fields->event;
    return fields->has_tokens && event->hash_count && event->pool.block_size &&
           (fields->has_lora || !fields->has_lora_number) &&
           fields->token_count == (uint64_t)event->hash_count * event->pool.block_size &&
           extras_are_plain(*reader, fields) && images_are_none(*reader, fields);
}

/* Finds the event's kind from all its fields; returns false if the typed decoder must find it. */
static bool classify(const Reader *reader, Fields *fields) {
    WireEvent *event = &fields->event;
    bool is_placeholder = (fields->has_block_size && !event->pool.block_size) ||
                          (fields->has_tokens && !fields->token_count);
    if (fields->is_remote) {
        event->kind = EVENT_OTHER_LOCALITY;
    } else if (fields->is_foreign) {
        event->kind = EVENT_FOREIGN_OWNERSHIP;
    } else if (event->kind == EVENT_STORED && event->group_kind == KIND_OTHER) {
        event->kind = EVENT_OTHER_GROUP;
        event->reach = reach_of(fields);
        return fields->has_hashes && fields->has_block_size;
    } else if (event->kind == EVENT_STORED && is_placeholder) {
        event->kind = EVENT_COPIED;
        return fields->has_hashes;
    } else if (event->kind == EVENT_STORED) {
        return fields->has_hashes && stored_is_sound(reader, fields);
    } else if (event->kind == EVENT_REMOVED) {
        return fields->has_hashes &&
               (!event->tells_left || fields->token_count == event->hash_count);
    }
    return true;
}

static const char *const stored_names[] = {
    "block_hashes", "parent_block_hash", "token_ids",  "block_size", "lora_id",
    "medium",       "lora_name",         "extra_keys", "group_idx",  "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
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

/* How many fields of an event are named by their position. */
static size_t named_positions(EventKind kind) {
    if (kind == EVENT_STORED) return sizeof stored_names / sizeof *stored_names;
    return kind == EVENT_REMOVED ? sizeof removed_names / sizeof *removed_names : 0;
}

/* Notes whether a store of this layout could name a salt, or an adapter; if it has the field of an
 * adapter's name, read_field() notes that it could. */
static void note_layout(WireEvent *event, bool by_position, size_t count) {
    event->names_salts = !by_position || count > 8; /* its tag, and fields up to extra_keys */
    event->names_loras = by_position ? 0 : -1;
}

/* Reads an event's fields, named or by position; returns false if out of memory. */
static bool read_fields(Index *index, Reader *reader, WireBatch *batch, Fields *fields) {
    bool by_position = is_array(reader);
    size_t count = by_position ? take_array(reader) : take_map(reader);
    if (reader->failed || !count || (!by_position && !text_is(take_text(reader), "type")))
        return !fail(reader); /* every publisher puts the tag first */
    if (!kind_of(take_text(reader), &fields->event.kind)) return !fail(reader);
    note_layout(&fields->event, by_position, count);
    size_t known = named_positions(fields->event.kind);
    const char *const *names = fields->event.kind == EVENT_STORED ? stored_names : removed_names;
    for (size_t n = 1; n < count && !reader->failed; n++) {
        Text name = by_position ? word(n <= known ? names[n - 1] : "") : take_text(reader);
        if (!reader->failed && !read_field(index, reader, name, batch, fields)) return false;
    }
    return true;
}

static WireResult read_event(Index *index, Reader *reader, WireBatch *batch) {
    Fields fields = {.event = {.pool = {.group = NO_GROUP}}};
    if (!read_fields(index, reader, batch, &fields)) return WIRE_NO_MEMORY;
    if (reader->failed || !classify(reader, &fields)) return WIRE_SURPRISE;
    if (fields.has_lora)
        fields.event.lora = wire_lora(index, fields.lora.at, fields.lora.length);
    if (!make_room((void **)&batch->events, &batch->event_room, batch->event_count, 1,
                   sizeof *batch->events))
        return WIRE_NO_MEMORY;
    batch->events[batch->event_count++] = fields.event;
    return WIRE_OK;
}

WireResult wire_begin(WireBatch *batch, const unsigned char *bytes, size_t length) {
    Reader *reader = &batch->reader;
    *reader = (Reader){bytes, bytes + length, false};
    batch->event_count = batch->hash_count = batch->token_count = 0;
    batch->fields = take_array(reader);
    if (batch->fields != 2 && batch->fields != 3) return WIRE_SURPRISE;
    if (peek(reader) != 0xcb) return WIRE_SURPRISE;
    reader->at++;
    uint64_t stamp = big_endian(reader, 8);
    if ((stamp >> 52 & 0x7ff) == 0x7ff) return WIRE_SURPRISE; /* infinite, or not a number */
    batch->left = take_array(reader);
    return reader->failed || batch->left > MAX_EVENTS ? WIRE_SURPRISE : WIRE_OK;
}

WireResult wire_parse(Index *index, WireBatch *batch) {
    Reader *reader = &batch->reader;
    for (; batch->left && !reader->failed; batch->left--) {
        if (index_is_over(index)) return WIRE_MORE;
        const unsigned char *start = reader->at;
        WireResult result = read_event(index, reader, batch);
        if (result != WIRE_OK) return result;
        index->work += 4 + (uint64_t)(reader->at - start) / 8;
    }
    if (batch->fields == 3) skip(reader);
    return reader->failed || reader->at != reader->end ? WIRE_SURPRISE : WIRE_OK;
}
