/* Reads vLLM's JSON in one pass, a whole reply or one event of a stream, without an object for each
   token.

   It takes what is usual only, and only JSON without white space between values. Whatever it does
   not take is read by `read_answer` of bridle.engines.vllm_routes, which also reads everything
   where this file was not compiled; tests/engines/test_core.py compares both. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST_NESTED 16
#define MOST_SPANS 64
#define MISSING -9998.0 /* vLLM writes -9999.0 for a missing logprob */

typedef struct {
    const char *at, *end;
} Text;

typedef struct {
    const char *start;
    size_t size;
} Piece;

typedef struct {
    long long version, start, end;
} Span;

typedef struct {
    int32_t *ids;
    float *logprobs;
    size_t count, room;
    int named; /* 1: an entry has its id in `token`; 0: in `token_id`; -1: no entry was read */
    Piece token_ids, finish;
    Span spans[MOST_SPANS];
    size_t span_count;
    long long cached;
    int has_prompt, has_usage, has_logprobs;
} Reply;

/* Each of these returns 1 and moves behind what it read, or 0 if it does not take the text. */

static int take(Text *text, char wanted) {
    if (text->at == text->end || *text->at != wanted) return 0;
    text->at++;
    return 1;
}

static int take_word(Text *text, const char *word) {
    size_t size = strlen(word);
    if ((size_t)(text->end - text->at) < size || memcmp(text->at, word, size)) return 0;
    text->at += size;
    return 1;
}

static int is_null(const Text *text) {
    Text copy = *text;
    return take_word(&copy, "null");
}

static int is_digit(const Text *text) {
    return text->at < text->end && *text->at >= '0' && *text->at <= '9';
}

/* A string of printable ASCII without escapes: names, ids, reasons. */
static int read_plain(Text *text, Piece *piece) {
    if (!take(text, '"')) return 0;
    piece->start = text->at;
    while (text->at < text->end && *text->at != '"') {
        unsigned char next = (unsigned char)*text->at++;
        if (next < 0x20 || next >= 0x80 || next == '\\') return 0;
    }
    piece->size = (size_t)(text->at - piece->start);
    return take(text, '"');
}

static int equals(const Piece *piece, const char *word) {
    return piece->size == strlen(word) && !memcmp(piece->start, word, piece->size);
}

/* A number of at most 18 digits without fraction or exponent. */
static int read_integer(Text *text, long long *value) {
    int negative = take(text, '-'), digits = 0;
    const char *first = text->at;
    *value = 0;
    while (is_digit(text) && digits++ < 18) *value = *value * 10 + (*text->at++ - '0');
    if (!digits || digits > 18 || (*first == '0' && digits > 1)) return 0;
    if (text->at < text->end && strchr(".eE", *text->at) && *text->at) return 0;
    if (negative) *value = -*value;
    return 1;
}

static int read_number(Text *text, double *value) {
    static const double tens[] = {1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11,
        1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    const char *start = text->at, *first;
    int negative = take(text, '-'), digits = 0, exponent = 0;
    uint64_t mantissa = 0;
    first = text->at;
    for (; is_digit(text); digits++) mantissa = mantissa * 10 + (uint64_t)(*text->at++ - '0');
    if (!digits || (*first == '0' && digits > 1)) return 0;
    if (take(text, '.')) {
        if (!is_digit(text)) return 0;
        for (; is_digit(text); digits++, exponent--)
            mantissa = mantissa * 10 + (uint64_t)(*text->at++ - '0');
    }
    if (text->at < text->end && (*text->at == 'e' || *text->at == 'E')) {
        int below, given = 0;
        text->at++;
        below = take(text, '-');
        if (!below) take(text, '+');
        if (!is_digit(text)) return 0;
        while (is_digit(text) && given < 10000) given = given * 10 + (*text->at++ - '0');
        if (is_digit(text)) return 0;
        exponent += below ? -given : given;
    }
    if (digits <= 18 && mantissa <= (1ULL << 53) && exponent >= -22 && exponent <= 22) {
        /* Both are exact doubles, so the quotient or product is rounded once. */
        double exact = (double)mantissa;
        exact = exponent < 0 ? exact / tens[-exponent] : exact * tens[exponent];
        *value = negative ? -exact : exact;
        return 1;
    }
    char copy[64];
    size_t size = (size_t)(text->at - start);
    if (size >= sizeof(copy)) return 0;
    memcpy(copy, start, size);
    copy[size] = 0;
    *value = PyOS_string_to_double(copy, NULL, NULL);
    if (!PyErr_Occurred()) return 1;
    PyErr_Clear();
    return 0;
}

/* Any string; its escapes and characters are not checked, because nothing reads it. */
static int skip_string(Text *text) {
    if (!take(text, '"')) return 0;
    while (text->at < text->end) {
        char next = *text->at++;
        if (next == '"') return 1;
        if ((unsigned char)next < 0x20) return 0;
        if (next == '\\' && text->at++ == text->end) return 0;
    }
    return 0;
}

static int skip_value(Text *text, int depth) {
    double number;
    if (text->at == text->end || depth > MOST_NESTED) return 0;
    switch (*text->at) {
        case '"': return skip_string(text);
        case 'n': return take_word(text, "null");
        case 't': return take_word(text, "true");
        case 'f': return take_word(text, "false");
        case '[':
            text->at++;
            if (take(text, ']')) return 1;
            do {
                if (!skip_value(text, depth + 1)) return 0;
            } while (take(text, ','));
            return take(text, ']');
        case '{':
            text->at++;
            if (take(text, '}')) return 1;
            do {
                if (!skip_string(text) || !take(text, ':')) return 0;
                if (!skip_value(text, depth + 1)) return 0;
            } while (take(text, ','));
            return take(text, '}');
        default: return read_number(text, &number);
    }
}

/* One sampled token: its logprob, and its id in `token_id` or in `token` as `token_id:7`. */
static int read_entry(Text *text, Reply *reply) {
    int has_id = 0, has_name = 0, has_logprob = 0;
    long long id = -1, named = -1;
    double logprob = 0;
    if (!take(text, '{')) return 0;
    do {
        Piece name;
        if (!read_plain(text, &name) || !take(text, ':')) return 0;
        if (equals(&name, "logprob")) {
            if (has_logprob++ || !read_number(text, &logprob)) return 0;
        } else if (equals(&name, "token_id")) {
            if (has_id++ || !read_integer(text, &id)) return 0;
        } else if (equals(&name, "token")) {
            Piece token;
            if (has_name++ || !read_plain(text, &token)) return 0;
            Text inner = {token.start, token.start + token.size};
            if (!take_word(&inner, "token_id:") || !read_integer(&inner, &named)) return 0;
            if (inner.at != inner.end) return 0;
        } else if (!skip_value(text, 0)) {
            return 0;
        }
    } while (take(text, ','));
    if (!take(text, '}') || !has_logprob || !(has_id || has_name)) return 0;
    if (reply->named >= 0 && reply->named != !has_id) return 0;
    reply->named = !has_id;
    if (!has_id) id = named;
    if (id < 0 || id > INT32_MAX || !(logprob > MISSING && logprob <= FLT_MAX)) return 0;
    if (reply->count == reply->room) {
        size_t room = reply->room ? 2 * reply->room : 512;
        void *ids = realloc(reply->ids, room * sizeof(int32_t));
        if (ids) reply->ids = ids;
        void *logprobs = realloc(reply->logprobs, room * sizeof(float));
        if (logprobs) reply->logprobs = logprobs;
        if (!ids || !logprobs) return 0;
        reply->room = room;
    }
    reply->ids[reply->count] = (int32_t)id;
    reply->logprobs[reply->count++] = (float)logprob;
    return 1;
}

static int read_logprobs(Text *text, Reply *reply) {
    if (reply->has_logprobs++ || !take(text, '{')) return 0;
    int has_content = 0;
    do {
        Piece name;
        if (!read_plain(text, &name) || !take(text, ':')) return 0;
        if (!equals(&name, "content")) {
            if (!is_null(text) || !skip_value(text, 0)) return 0;
            continue;
        }
        if (has_content++ || !take(text, '[')) return 0;
        do {
            if (!read_entry(text, reply)) return 0;
        } while (take(text, ','));
        if (!take(text, ']')) return 0;
    } while (take(text, ','));
    return take(text, '}');
}

static int read_spans(Text *text, Reply *reply) {
    if (reply->span_count) return 0;
    if (is_null(text)) return skip_value(text, 0);
    if (!take(text, '[')) return 0;
    do {
        Span span = {-1, -1, -1};
        if (reply->span_count == MOST_SPANS || !take(text, '{')) return 0;
        do {
            Piece name;
            long long *field;
            if (!read_plain(text, &name) || !take(text, ':')) return 0;
            if (equals(&name, "version")) {
                int quoted = take(text, '"');
                if (span.version >= 0 || !read_integer(text, &span.version)) return 0;
                if (quoted && !take(text, '"')) return 0;
                continue;
            }
            field = equals(&name, "start") ? &span.start : equals(&name, "end") ? &span.end : NULL;
            if (!field || *field >= 0 || !read_integer(text, field)) return 0;
        } while (take(text, ','));
        if (!take(text, '}') || span.version < 0 || span.start < 0 || span.end < 0) return 0;
        reply->spans[reply->span_count++] = span;
    } while (take(text, ','));
    return take(text, ']');
}

static int read_choice(Text *text, Reply *reply) {
    if (!take(text, '{')) return 0;
    do {
        Piece name;
        if (!read_plain(text, &name) || !take(text, ':')) return 0;
        const char *start = text->at;
        if (equals(&name, "logprobs")) {
            if (!read_logprobs(text, reply)) return 0;
        } else if (equals(&name, "finish_reason")) {
            if (reply->finish.start) return 0;
            if (is_null(text) ? !skip_value(text, 0) : !read_plain(text, &reply->finish)) return 0;
        } else if (equals(&name, "token_ids")) {
            if (reply->token_ids.start || !skip_value(text, 0)) return 0;
            reply->token_ids = (Piece){start, (size_t)(text->at - start)};
        } else if (equals(&name, "weight_versions")) {
            if (!read_spans(text, reply)) return 0;
        } else if (equals(&name, "index") || equals(&name, "message") || equals(&name, "delta")) {
            if (!skip_value(text, 0)) return 0;
        } else if (equals(&name, "stop_reason")) {
            long long id;
            if (is_null(text) ? !skip_value(text, 0) : !read_integer(text, &id)) return 0;
        } else if (!is_null(text) || !skip_value(text, 0)) {
            return 0; /* experts, a text, what another version may add */
        }
    } while (take(text, ','));
    return take(text, '}');
}

/* The tokens of the prompt that the engine had cached. */
static int read_details(Text *text, long long *cached) {
    if (is_null(text)) return skip_value(text, 0);
    if (!take(text, '{')) return 0;
    if (take(text, '}')) return 1;
    do {
        Piece name;
        if (!read_plain(text, &name) || !take(text, ':')) return 0;
        int is_cached = equals(&name, "cached_tokens") && !is_null(text);
        if (is_cached ? !read_integer(text, cached) : !skip_value(text, 0)) return 0;
    } while (take(text, ','));
    return take(text, '}');
}

static int read_usage(Text *text, long long *cached) {
    if (is_null(text)) return skip_value(text, 0);
    if (!take(text, '{')) return 0;
    do {
        Piece name;
        long long count;
        if (!read_plain(text, &name) || !take(text, ':')) return 0;
        if (equals(&name, "prompt_tokens_details")) {
            if (!read_details(text, cached)) return 0;
        } else if (is_null(text) ? !skip_value(text, 0) : !read_integer(text, &count)) {
            return 0;
        }
    } while (take(text, ','));
    return take(text, '}');
}

/* Without `sent`, no prompt's ids are taken. */
static int read_body(Text *text, Reply *reply, const char *sent, size_t sent_size) {
    int has_choices = 0;
    if (!take(text, '{')) return 0;
    do {
        Piece name;
        if (!read_plain(text, &name) || !take(text, ':')) return 0;
        if (equals(&name, "choices")) {
            if (has_choices++ || !take(text, '[') || !read_choice(text, reply)) return 0;
            if (!take(text, ']')) return 0;
        } else if (equals(&name, "prompt_token_ids") && !(is_null(text) && !sent)) {
            if (!sent || reply->has_prompt++ || (size_t)(text->end - text->at) < sent_size) return 0;
            if (memcmp(text->at, sent, sent_size)) return 0;
            text->at += sent_size;
        } else if (equals(&name, "usage") && !is_null(text)) {
            if (reply->has_usage++ || !read_usage(text, &reply->cached)) return 0;
        } else if (equals(&name, "error") ? !is_null(text) || !skip_value(text, 0)
                                          : !skip_value(text, 0)) {
            return 0;
        }
    } while (take(text, ','));
    return take(text, '}') && text->at == text->end && has_choices;
}

/* Whether the sampled ids are those that the logprobs name. */
static int is_paired(const Reply *reply) {
    Text text = {reply->token_ids.start, reply->token_ids.start + reply->token_ids.size};
    if (!reply->token_ids.start || !reply->count || !take(&text, '[')) return 0;
    for (size_t place = 0; place < reply->count; place++) {
        long long id;
        if (place && !take(&text, ',')) return 0;
        if (!read_integer(&text, &id) || id != reply->ids[place]) return 0;
    }
    return take(&text, ']') && text.at == text.end;
}

static PyObject *spans_of(const Reply *reply) {
    PyObject *spans = PyTuple_New((Py_ssize_t)reply->span_count);
    for (size_t place = 0; spans && place < reply->span_count; place++) {
        const Span *span = &reply->spans[place];
        PyObject *one = Py_BuildValue("(LLL)", span->version, span->start, span->end);
        if (!one || PyTuple_SetItem(spans, (Py_ssize_t)place, one) < 0) Py_CLEAR(spans);
    }
    return spans;
}

/* The ids, their logprobs, and the least and largest of both. */
static PyObject *tokens_of(const Reply *reply) {
    int32_t least_id = reply->ids[0], largest_id = reply->ids[0];
    float least = reply->logprobs[0], largest = reply->logprobs[0];
    for (size_t place = 1; place < reply->count; place++) {
        if (reply->ids[place] < least_id) least_id = reply->ids[place];
        if (reply->ids[place] > largest_id) largest_id = reply->ids[place];
        if (reply->logprobs[place] < least) least = reply->logprobs[place];
        if (reply->logprobs[place] > largest) largest = reply->logprobs[place];
    }
    return Py_BuildValue("(y#y#(iiff))", (const char *)reply->ids,
        (Py_ssize_t)(reply->count * sizeof(int32_t)), (const char *)reply->logprobs,
        (Py_ssize_t)(reply->count * sizeof(float)), least_id, largest_id, least, largest);
}

static PyObject *result_of(const Reply *reply) {
    PyObject *tokens = tokens_of(reply), *spans = tokens ? spans_of(reply) : NULL;
    if (!spans) {
        Py_XDECREF(tokens);
        return NULL;
    }
    return Py_BuildValue("(Ns#NL)", tokens, reply->finish.start, (Py_ssize_t)reply->finish.size,
        spans, reply->cached > 0 ? reply->cached : 0LL);
}

static PyObject *read_reply(PyObject *module, PyObject *args) {
    Py_buffer body, sent;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*", &body, &sent)) return NULL;
    Reply reply = {.named = -1};
    Text text = {body.buf, (const char *)body.buf + body.len};
    PyObject *result = NULL;
    if (read_body(&text, &reply, sent.buf, (size_t)sent.len) && reply.has_prompt &&
        reply.finish.start && is_paired(&reply))
        result = result_of(&reply);
    else
        result = Py_NewRef(Py_None);
    free(reply.ids);
    free(reply.logprobs);
    PyBuffer_Release(&body);
    PyBuffer_Release(&sent);
    return result;
}

static PyObject *read_event(PyObject *module, PyObject *body) {
    char *start;
    Py_ssize_t size;
    (void)module;
    if (PyBytes_AsStringAndSize(body, &start, &size) < 0) return NULL;
    Reply reply = {.named = -1};
    Text text = {start, start + size};
    int is_usual = read_body(&text, &reply, NULL, 0) && !reply.finish.start && !reply.span_count &&
        !reply.has_usage && is_paired(&reply);
    PyObject *result = is_usual ? tokens_of(&reply) : Py_NewRef(Py_None);
    free(reply.ids);
    free(reply.logprobs);
    return result;
}

static PyMethodDef methods[] = {{"read_reply", read_reply, METH_VARARGS, NULL},
    {"read_event", read_event, METH_O, NULL}, {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "_core", .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
